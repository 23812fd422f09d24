"""Tests of the command; a package, so that its conftest is not a second module of that name."""

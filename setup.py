"""For tools that still ask for a setup.py: everything is in pyproject.toml."""

from setuptools import setup

setup()

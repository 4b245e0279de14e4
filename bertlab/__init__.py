"""BERT, part by part: the package that you fill in as you work through the course."""

__version__ = "0.1.0"

"""Presents traces and plans as numbers, tables, JSON objects and files."""

"""Traces and plans as numbers, tables and files."""

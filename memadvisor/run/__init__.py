"""The run format: rows, journals, directories (docs/run-format.md)."""

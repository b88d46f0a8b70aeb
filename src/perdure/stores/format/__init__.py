"""The bytes of rows: part of the stored format, and the same in every engine."""

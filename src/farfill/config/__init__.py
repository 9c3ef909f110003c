"""The cluster file: load, validate, cross-check; secret references; where caches live."""

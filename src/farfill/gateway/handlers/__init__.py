"""HTTP handlers: they join parsing, the pipeline and rendering."""

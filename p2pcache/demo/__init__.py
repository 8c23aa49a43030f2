"""A real small model and real text, for demos, end-to-end tests and benchmarks; no network needed."""

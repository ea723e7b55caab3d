"""Which query sees which key: specs, documents and slices, as intervals that plain Python counts."""

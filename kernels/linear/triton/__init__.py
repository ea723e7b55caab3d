"""Linear attention for GPUs: with gates alone, and by the delta rule."""

"""A model made of slots: `spec` describes it as plain data, and `transformer` runs it."""

"""The model as slots: `spec` describes it as plain data, `transformer` runs it."""

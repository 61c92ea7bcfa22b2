"""The model as slots: `spec` says what it is in plain data, `transformer` runs it."""

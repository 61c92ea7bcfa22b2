"""Parts of the sweep runner: definition, cells, processes, results, figures, estimates."""

"""T5's supervised tasks: pairs of texts made from a data set's rows, and their metrics."""

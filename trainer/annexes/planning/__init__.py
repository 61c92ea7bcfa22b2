"""Plans runs: compiles their programs ahead of time and reads the compiler's estimates."""

"""Arrow files, and folders that `datasets` saved."""

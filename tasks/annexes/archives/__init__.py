"""Files in tar and zip archives."""

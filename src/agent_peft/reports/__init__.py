"""Reports: what run directories hold, as one page for a browser."""

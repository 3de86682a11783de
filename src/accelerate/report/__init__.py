"""The page of a run: records of runs are read, thinned, and drawn in one HTML file."""

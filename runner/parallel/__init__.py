"""One model over several processes: which part each rank holds, and how ranks talk."""

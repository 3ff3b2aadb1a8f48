"""Why few drafts are accepted: what the files of a head and experiments with it say."""

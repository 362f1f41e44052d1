"""Device code. Nothing here imports anything of ours, and nothing here launches anything."""

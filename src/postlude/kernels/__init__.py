"""Device code. Nothing here imports another part of Postlude, and nothing here launches a kernel."""

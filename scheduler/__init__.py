"""The scheduler of continuous batching: standard library only. Its modules come with continuous batching itself."""

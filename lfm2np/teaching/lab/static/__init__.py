"""The laboratory as a folder of files: Pyodide runs the engine in the visitor's own browser, and no server computes."""

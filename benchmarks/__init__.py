"""What the plug-in itself costs in time, measured side by side in one process: `python -m benchmarks`."""

"""The last stage, and what checks or shows a finished dataset."""

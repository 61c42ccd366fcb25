"""Sources of samples.

`naming.py` opens the data that a user names as stores of records: JSON, Parquet, tar shards, Hugging Face data sets,
each kind in its own file, with the methods of `record_store.py`. `indexed_source.py` makes samples of their records.
Data that can only be read in order are a stream (`stream_source.py`).
"""

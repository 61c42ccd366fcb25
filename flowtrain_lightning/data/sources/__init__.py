"""Where samples come from.

What a user names becomes a store of records (`naming.py`): a file of JSON, a Parquet file, a tar shard, a Hugging Face
data set, each in a file of its own, all alike by `record_store.py`. `indexed_source.py` makes samples of a store's
records. What can only be read in order is a stream (`stream_source.py`).
"""

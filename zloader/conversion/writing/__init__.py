"""Writing: elements into chunks, shards and objects, at a place that is never seen half done."""

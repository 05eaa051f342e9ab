"""How stores are reached: URLs and credentials, web servers, local files, reads that are asked for again."""

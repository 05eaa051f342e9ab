"""How stores are reached: URLs, credentials, listings, web servers, local files, and retried reads."""

"""From .h5ad and other sources to a store; appending to stores and verifying them."""

"""The local cache: mirrors of stores, disk limits, leases between processes, checksums, cached columns and objects."""

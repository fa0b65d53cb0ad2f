"""The benchmark: Tidewater beside its peers, in one run, interleaved. See README.md."""

"""What has been: samples of minutes, records of requests and the ledger over time."""

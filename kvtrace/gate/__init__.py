"""Gates over reports: the contract of a good run, rules, comparison. Pure functions over report.json."""

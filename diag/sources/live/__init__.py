"""Live servers, scraped on a cadence."""

"""Did a change fix an incident: two snapshots of the same servers, compared. Data only: nothing here prints."""

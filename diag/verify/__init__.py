"""Did a change cure an incident: two looks at the same servers, compared. Data only: nothing here prints."""

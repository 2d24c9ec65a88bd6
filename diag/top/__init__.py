"""A live view of servers: scraped or queried in the background, judged as the doctor does, shown in a terminal."""

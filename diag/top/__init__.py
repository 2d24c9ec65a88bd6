"""A live view of servers: scraped or queried in the background, judged by the doctor, shown in a terminal."""

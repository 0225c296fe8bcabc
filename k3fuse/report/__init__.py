"""What plans and passes look like to people: summaries, tables, the HTML page, differences."""

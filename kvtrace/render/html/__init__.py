"""The report as one HTML file: ``page.page(report, picture)``. What stands beside it (CSS, JavaScript, the
charting library) is put into the file: it loads nothing."""

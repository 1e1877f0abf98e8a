"""The report as one HTML file: ``page.page(report, picture)``.

Comes in: a report, a picture; CSS, JavaScript and the charting library from beside it.
Goes out: one file.
May not: load anything when it is opened.
"""

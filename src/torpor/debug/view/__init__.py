"""`torpor view`: a local web page that shows what a program recorded, compiled and ran."""

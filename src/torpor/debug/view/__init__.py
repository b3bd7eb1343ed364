"""`torpor view`: a local page that shows what a program recorded, compiled and ran."""

"""A run as pictures (drawings/) and as lessons in a browser (lab/): what a learner looks at."""

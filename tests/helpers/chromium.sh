#!/bin/sh
# Chromium without the right to real time. Its threads of sound take that right where they may, as root may; two of them that spin leave no
# time to any other process of a machine with two cores, and no test comes to its end.
if [ "$(id -u)" = 0 ]; then
  exec setpriv --bounding-set=-sys_nice --inh-caps=-sys_nice -- chromium "$@"
fi
exec chromium "$@"

"""python -m expertile"""

from expertile.cli import main

main()

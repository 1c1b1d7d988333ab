from expertile.audit.command import main

raise SystemExit(main())

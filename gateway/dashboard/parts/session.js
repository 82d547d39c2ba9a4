// The administrator that is signed in, and what its scopes allow.

import { createContext, useContext } from "./html.js";

export const Session = createContext(null);

// {me, can(scope), query, range}
export const useSession = () => useContext(Session);
